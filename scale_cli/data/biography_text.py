"""Word lists and sentence templates of the synthetic biographies, in English and Korean.

A word is a pair (English, Korean). No word of a list begins another of the same list, in either language, so
that the first tokens of an answer can tell it from the others.
"""

from itertools import product


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Read the (English, Korean) pairs of a list written 'English=Korean, English=Korean, ...'."""
    entries = (entry.strip().partition("=") for entry in text.split(","))
    return tuple((english, korean) for english, _, korean in entries)


def _institutions(english_kind: str, korean_kind: str, names: str) -> tuple[tuple[str, str], ...]:
    """Follow each name of a list with the kind of institution that it is."""
    return tuple((f"{english} {english_kind}", f"{korean} {korean_kind}") for english, korean in _pairs(names))


FEMININE_NAMES = _pairs("""
    Abigail=애비게일, Agnes=아그네스, Alice=앨리스, Amelia=아멜리아, Beatrice=비어트리스, Bridget=브리짓,
    Camille=카밀, Caroline=캐럴라인, Cecilia=세실리아, Clara=클라라, Cordelia=코델리아, Daphne=대프니,
    Deborah=데버라, Diana=다이애나, Dorothy=도러시, Edith=이디스, Eleanor=엘리너, Elizabeth=엘리자베스,
    Emma=에마, Esther=에스터, Evelyn=이블린, Fiona=피오나, Flora=플로라, Genevieve=제너비브, Gloria=글로리아,
    Grace=그레이스, Hannah=해나, Harriet=해리엇, Hazel=헤이즐, Helen=헬렌, Ingrid=잉그리드, Irene=아이린,
    Isabel=이저벨, Jane=제인, Joanna=조애나, Judith=주디스, Laura=로라, Lillian=릴리언, Louisa=루이자,
    Lucy=루시, Mabel=메이블, Margaret=마거릿, Matilda=마틸다, Miriam=미리엄, Nancy=낸시, Naomi=나오미,
    Nora=노라, Olivia=올리비아, Penelope=퍼넬러피, Phoebe=피비, Rebecca=리베카, Rosalind=로절린드,
    Sylvia=실비아, Teresa=테리사, Veronica=베로니카, Valerie=밸러리, Winifred=위니프리드
""")

MASCULINE_NAMES = _pairs("""
    Adam=애덤, Albert=앨버트, Alfred=앨프리드, Andrew=앤드루, Anthony=앤서니, Arthur=아서, Benjamin=벤저민,
    Bernard=버나드, Caleb=케일럽, Charles=찰스, Christopher=크리스토퍼, Clarence=클래런스, Daniel=대니얼,
    David=데이비드, Dominic=도미닉, Edgar=에드거, Edmund=에드먼드, Edward=에드워드, Ernest=어니스트,
    Eugene=유진, Felix=펠릭스, Frederick=프레더릭, Gabriel=게이브리얼, Gilbert=길버트, Gregory=그레고리,
    Harold=해럴드, Henry=헨리, Herbert=허버트, Hugh=휴, Isaac=아이작, Jacob=제이컵, James=제임스,
    Jonathan=조너선, Joseph=조지프, Julian=줄리언, Kenneth=케네스, Lawrence=로런스, Leonard=레너드,
    Lucas=루커스, Martin=마틴, Matthew=매슈, Maurice=모리스, Michael=마이클, Nathan=네이선,
    Nicholas=니컬러스, Oliver=올리버, Oscar=오스카, Patrick=패트릭, Peter=피터, Philip=필립,
    Raymond=레이먼드, Richard=리처드, Robert=로버트, Samuel=새뮤얼, Simon=사이먼, Stephen=스티븐,
    Theodore=시어도어, Thomas=토머스, Timothy=티머시, Victor=빅터, Vincent=빈센트, Walter=월터,
    William=윌리엄
""")

# Middle names that women and men both bear, so that any first name goes with any of them.
MIDDLE_NAMES = _pairs("""
    Avery=에이버리, Bailey=베일리, Blair=블레어, Blake=블레이크, Brooks=브룩스, Cameron=캐머런, Carey=케어리,
    Carson=카슨, Carter=카터, Casey=케이시, Chandler=챈들러, Clark=클라크, Collins=콜린스, Cooper=쿠퍼,
    Corey=코리, Dana=데이나, Dawson=도슨, Devon=데번, Dixon=딕슨, Drew=드루, Dylan=딜런, Eden=이든,
    Elliot=엘리엇, Ellis=엘리스, Emerson=에머슨, Emery=에머리, Fallon=팰런, Finley=핀리, Fletcher=플레처,
    Flynn=플린, Foster=포스터, Frost=프로스트, Garnet=가넷, Grant=그랜트, Greer=그리어, Hadley=해들리,
    Harley=할리, Harlow=할로, Harper=하퍼, Hayden=헤이든, Hayes=헤이스, Holland=홀랜드, Hollis=홀리스,
    Hudson=허드슨, Hunter=헌터, Jordan=조던, Keegan=키건, Kelly=켈리, Kendall=켄들, Kennedy=케네디,
    Kerry=케리, Lane=레인, Lennon=레넌, Leslie=레슬리, Lindsay=린지, Logan=로건, Mackenzie=매켄지,
    Madison=매디슨, Marlowe=말로, Mason=메이슨, Merritt=메릿, Monroe=먼로, Morgan=모건, Murphy=머피,
    Nelson=넬슨, Nolan=놀런, Oakley=오클리, Parker=파커, Perry=페리, Peyton=페이턴, Porter=포터,
    Presley=프레슬리, Quincy=퀸시, Reagan=레이건, Reed=리드, Remy=레미, Riley=라일리, Robin=로빈,
    Rory=로리, Rowan=로언, Ryan=라이언, Sage=세이지, Sawyer=소여, Scott=스콧, Shannon=섀넌, Shea=셰이,
    Shelby=셸비, Skyler=스카일러, Sloan=슬론, Spencer=스펜서, Sterling=스털링, Sutton=서턴, Tanner=태너,
    Tate=테이트, Taylor=테일러, Terry=테리, Tracy=트레이시, Tyler=타일러, Wade=웨이드, Walker=워커,
    Wallace=월리스, Wesley=웨슬리, Whitney=휘트니, Winter=윈터, Wren=렌, Wyatt=와이엇
""")

_LAST_NAME_STEMS = _pairs("""
    Bar=바, Black=블랙, Clay=클레이, Crow=크로, Dun=던, Ever=에버, Fair=페어, Fen=펜, Green=그린, Hal=핼,
    Har=하, Hol=홀, Ken=켄, Kirk=커크, Lang=랭, Lin=린, Mar=마, Mil=밀, Ren=렌, Rock=록, Stan=스탠,
    Thorn=손, Wal=월, Win=윈
""")
_LAST_NAME_ENDINGS = _pairs("""
    brook=브룩, bury=베리, dale=데일, field=필드, ford=퍼드, stone=스톤, ton=턴, well=웰, wood=우드, worth=워스
""")
LAST_NAMES = tuple(
    (english_stem + english_ending, korean_stem + korean_ending)
    for (english_stem, korean_stem), (english_ending, korean_ending) in product(_LAST_NAME_STEMS, _LAST_NAME_ENDINGS)
)

CITIES = _pairs("""
    Amsterdam=암스테르담, Ankara=앙카라, Antwerp=안트베르펜, Athens=아테네, Atlanta=애틀랜타, Auckland=오클랜드,
    Baltimore=볼티모어, Bangkok=방콕, Barcelona=바르셀로나, Belfast=벨파스트, Belgrade=베오그라드,
    Bergen=베르겐, Berlin=베를린, Bogota=보고타, Bologna=볼로냐, Bordeaux=보르도, Boston=보스턴,
    Bremen=브레멘, Brisbane=브리즈번, Bristol=브리스틀, Brussels=브뤼셀, Bucharest=부쿠레슈티,
    Budapest=부다페스트, Cairo=카이로, Calgary=캘거리, Canberra=캔버라, Cardiff=카디프,
    Casablanca=카사블랑카, Chicago=시카고, Cologne=쾰른, Copenhagen=코펜하겐, Cordoba=코르도바, Dakar=다카르,
    Denver=덴버, Detroit=디트로이트, Dresden=드레스덴, Dublin=더블린, Edinburgh=에든버러,
    Edmonton=에드먼턴, Florence=피렌체, Fukuoka=후쿠오카, Gdansk=그단스크, Geneva=제네바, Genoa=제노바,
    Ghent=겐트, Glasgow=글래스고, Granada=그라나다, Halifax=핼리팩스, Hamburg=함부르크, Hanoi=하노이,
    Havana=아바나, Helsinki=헬싱키, Honolulu=호놀룰루, Houston=휴스턴, Istanbul=이스탄불, Jakarta=자카르타,
    Kyoto=교토, Lausanne=로잔, Leeds=리즈, Leipzig=라이프치히, Lima=리마, Lisbon=리스본, Liverpool=리버풀,
    Ljubljana=류블랴나, London=런던, Lyon=리옹, Madrid=마드리드, Manchester=맨체스터, Manila=마닐라,
    Marseille=마르세유, Melbourne=멜버른, Miami=마이애미, Milan=밀라노, Minneapolis=미니애폴리스,
    Montreal=몬트리올, Munich=뮌헨, Nagoya=나고야, Nairobi=나이로비, Naples=나폴리, Nashville=내슈빌,
    Osaka=오사카, Oslo=오슬로, Ottawa=오타와, Perth=퍼스, Philadelphia=필라델피아, Pittsburgh=피츠버그,
    Portland=포틀랜드, Prague=프라하, Quito=키토, Reykjavik=레이캬비크, Riga=리가, Rome=로마,
    Rotterdam=로테르담, Salzburg=잘츠부르크, Santiago=산티아고, Sapporo=삿포로, Seattle=시애틀,
    Seville=세비야, Singapore=싱가포르, Stockholm=스톡홀름, Stuttgart=슈투트가르트, Sydney=시드니,
    Tallinn=탈린, Toronto=토론토, Toulouse=툴루즈, Turin=토리노, Utrecht=위트레흐트, Valencia=발렌시아,
    Vancouver=밴쿠버, Venice=베네치아, Vilnius=빌뉴스, Warsaw=바르샤바, Wellington=웰링턴, Zagreb=자그레브,
    Zurich=취리히
""")

UNIVERSITIES = (
    *_institutions(
        "University",
        "대학교",
        """
        Aldermoor=올더무어, Brightwater=브라이트워터, Cedarhurst=시더허스트, Dovercliff=도버클리프,
        Eastvale=이스트베일, Fernhill=펀힐, Glenmarch=글렌마치, Harrowgate=해로게이트, Ivybridge=아이비브리지,
        Jasperton=재스퍼턴, Kingsmere=킹스미어, Lakemont=레이크몬트, Maplecrest=메이플크레스트,
        Northgate=노스게이트, Oakhaven=오크헤이븐, Pemberley=펨벌리, Queensbridge=퀸스브리지,
        Ravenhurst=레이븐허스트, Silverlake=실버레이크, Tidewater=타이드워터, Underhill=언더힐,
        Westmere=웨스트미어, Yarrowdale=야로데일
        """,
    ),
    *_institutions(
        "College",
        "칼리지",
        """
        Ambleton=앰블턴, Birchgrove=버치그로브, Coldspring=콜드스프링, Driftwood=드리프트우드,
        Elmhurst=엘름허스트, Foxglove=폭스글러브, Goldcrest=골드크레스트, Hawthorne=호손, Islington=이즐링턴,
        Juniper=주니퍼, Larkspur=라크스퍼, Meadowbrook=메도브룩, Nightingale=나이팅게일, Orchard=오처드,
        Primrose=프림로즈
        """,
    ),
    *_institutions(
        "State University",
        "주립대학교",
        """
        Bluemont=블루몬트, Crestview=크레스트뷰, Flintridge=플린트리지, Grandview=그랜드뷰,
        Highplain=하이플레인, Lonepine=론파인, Mesaverde=메사베르데, Redcliff=레드클리프, Stonebridge=스톤브리지,
        Sunridge=선리지, Timberline=팀버라인, Whitewater=화이트워터
        """,
    ),
    *_institutions(
        "Institute of Technology",
        "공과대학교",
        """
        Arkwright=아크라이트, Babbage=배비지, Copperfield=코퍼필드, Hargreave=하그리브, Ironbridge=아이언브리지,
        Kelvinside=켈빈사이드, Lovelace=러브레이스, Newcomen=뉴커먼, Stephenson=스티븐슨, Tesmond=테즈먼드,
        Vanterpool=밴터풀, Whitworth=휘트워스
        """,
    ),
)

MAJORS = _pairs("""
    accounting=회계학, aerospace engineering=항공우주공학, agriculture=농학, anthropology=인류학,
    archaeology=고고학, architecture=건축학, art history=미술사학, astronomy=천문학, biochemistry=생화학,
    biology=생물학, botany=식물학, business administration=경영학, chemistry=화학, civil engineering=토목공학,
    classics=고전학, communications=신문방송학, computer science=컴퓨터과학, criminology=범죄학, dance=무용,
    data science=데이터과학, dentistry=치의학, design=디자인, economics=경제학, education=교육학,
    electrical engineering=전기공학, English literature=영문학, environmental science=환경과학,
    film studies=영화학, finance=금융학, forestry=산림학, genetics=유전학, geography=지리학, geology=지질학,
    history=역사학, journalism=언론학, law=법학, linguistics=언어학, marketing=마케팅,
    materials science=재료과학, mathematics=수학, mechanical engineering=기계공학, medicine=의학,
    meteorology=기상학, microbiology=미생물학, music=음악, neuroscience=신경과학, nursing=간호학,
    nutrition=영양학, oceanography=해양학, pharmacy=약학, philosophy=철학, physics=물리학,
    political science=정치학, psychology=심리학, public health=보건학, social work=사회복지학,
    sociology=사회학, statistics=통계학, theology=신학, urban planning=도시계획학,
    veterinary medicine=수의학, zoology=동물학
""")

EMPLOYERS = (
    *_institutions("Systems", "시스템즈", "Altair=알타이르, Cobalt=코발트, Helix=헬릭스, Lumen=루멘, Vertex=버텍스"),
    *_institutions(
        "Foods", "푸드", "Acorn=에이콘, Clover=클로버, Honeydew=허니듀, Pepperhill=페퍼힐, Sunflower=선플라워"
    ),
    *_institutions(
        "Motors", "모터스", "Comet=코멧, Falcon=팰컨, Meridian=메리디언, Thunderbolt=선더볼트, Velox=벨록스"
    ),
    *_institutions("Media", "미디어", "Beacon=비컨, Echo=에코, Kaleido=컬라이도, Mosaic=모자이크, Prism=프리즘"),
    *_institutions("Bank", "은행", "Anchor=앵커, Bedrock=베드록, Crown=크라운, Heritage=헤리티지, Sovereign=소버린"),
    *_institutions(
        "Pharmaceuticals",
        "제약",
        "Asclepia=아스클레피아, Panacea=파나세아, Remedia=레메디아, Salvia=살비아, Vitalis=비탈리스",
    ),
    *_institutions(
        "Airlines",
        "항공",
        "Albatross=앨버트로스, Horizon=호라이즌, Skylark=스카이라크, Swallow=스왈로, Zephyr=제퍼",
    ),
    *_institutions(
        "Energy", "에너지", "Aurora=오로라, Dynamo=다이너모, Geyser=가이저, Solaris=솔라리스, Torrent=토렌트"
    ),
    *_institutions(
        "Logistics",
        "물류",
        "Caravan=캐러밴, Compass=컴퍼스, Gateway=게이트웨이, Harbor=하버, Pathfinder=패스파인더",
    ),
    *_institutions(
        "Software",
        "소프트웨어",
        "Bluebird=블루버드, Cipher=사이퍼, Lattice=래티스, Nimbus=님버스, Quanta=콴타",
    ),
    *_institutions(
        "Insurance",
        "보험",
        "Bulwark=불워크, Citadel=시타델, Guardian=가디언, Lighthouse=라이트하우스, Umbrella=엄브렐러",
    ),
    *_institutions("Publishing", "출판사", "Folio=폴리오, Inkwell=잉크웰, Parchment=파치먼트, Quill=퀼, Vellum=벨럼"),
    *_institutions("Electronics", "전자", "Ampere=암페어, Neon=네온, Photon=포톤, Silica=실리카, Zenon=제논"),
    *_institutions(
        "Construction",
        "건설",
        "Granite=그래닛, Keystone=키스톤, Monolith=모놀리스, Pillar=필러, Rampart=램파트",
    ),
    *_institutions(
        "Textiles", "섬유", "Indigo=인디고, Linden=린든, Merino=메리노, Saffron=사프란, Tapestry=태피스트리"
    ),
    *_institutions(
        "Consulting",
        "컨설팅",
        "Delphi=델파이, Fulcrum=펄크럼, Insight=인사이트, Northstar=노스스타, Polaris=폴라리스",
    ),
)

# {subject} and {possessive} are the person by name or pronoun ("Ann", "she"; "Ann's", "her"); {their} is always
# the pronoun, for a second mention in the same sentence.
ENGLISH_TEMPLATES = {
    "birth_date": (
        "{subject} was born on {value}.",
        "{subject} came into the world on {value}.",
        "{subject} first saw the light of day on {value}.",
        "{possessive} date of birth is {value}.",
        "{possessive} birth date is {value}.",
        "{possessive} life began on {value}.",
        "On {value}, {subject} was born.",
        "It was on {value}, that {subject} was born.",
        "Records give {possessive} date of birth as {value}.",
        "The day of {possessive} birth was {value}.",
    ),
    "birth_city": (
        "{subject} was born in {value}.",
        "{subject} was born and raised in {value}.",
        "{subject} is a native of {value}.",
        "{subject} hails from {value}.",
        "{subject} spent {their} first years in {value}, the city of {their} birth.",
        "{possessive} birthplace is {value}.",
        "{possessive} city of birth is {value}.",
        "{possessive} parents were living in {value} at the time of {their} birth.",
        "{value} is the city where {subject} was born.",
        "{value} is {possessive} birthplace.",
        "It was in {value} that {subject} was born.",
    ),
    "university": (
        "{subject} graduated from {value}.",
        "{subject} studied at {value}.",
        "{subject} attended {value}.",
        "{subject} is a graduate of {value}.",
        "{subject} completed {their} degree at {value}.",
        "{subject} received {their} higher education at {value}.",
        "{possessive} alma mater is {value}.",
        "{possessive} student years were spent at {value}.",
        "{value} is {possessive} alma mater.",
        "It was at {value} that {subject} completed {their} studies.",
    ),
    "major": (
        "{subject} majored in {value}.",
        "{subject} holds a degree in {value}.",
        "{subject} earned a degree in {value}.",
        "{subject} specialized in {value} as a student.",
        "{subject} chose {value} as {their} major.",
        "{subject} devoted {their} studies to {value}.",
        "{possessive} major was {value}.",
        "{possessive} field of study was {value}.",
        "{possessive} degree is in {value}.",
        "As a student, {subject} concentrated on {value}.",
    ),
    "employer": (
        "{subject} works for {value}.",
        "{subject} is employed by {value}.",
        "{subject} is on the staff of {value}.",
        "{subject} holds a position at {value}.",
        "{subject} has built {their} career at {value}.",
        "{subject} earns {their} living at {value}.",
        "{possessive} employer is {value}.",
        "{possessive} current job is with {value}.",
        "{value} is {possessive} employer.",
        "{value} is the company where {subject} works.",
    ),
    "work_city": (
        "{subject} works in {value}.",
        "{subject} has a job in {value}.",
        "{subject} goes to work in {value}.",
        "{subject} pursues {their} career in {value}.",
        "{subject} spends {their} working days in {value}.",
        "{possessive} workplace is in {value}.",
        "{possessive} office is in {value}.",
        "{possessive} place of work is in {value}.",
        "{value} is the city where {subject} works.",
        "For work, {subject} is based in {value}.",
    ),
}

# {subject}, {clause_subject} and {possessive} carry their particle and the space after it, since a later
# sentence may leave {subject} and {possessive} out ("", "그는 " or "앤은 "; "그가 "; "", "그의 "). 은(는) and the
# like are resolved by the syllable before them.
KOREAN_TEMPLATES = {
    "birth_date": (
        "{subject}{value}에 태어났다.",
        "{subject}{value} 세상에 태어났다.",
        "{subject}{value}생이다.",
        "{possessive}생년월일은 {value}(이)다.",
        "{possessive}출생일은 {value}(이)다.",
        "{possessive}생일은 {value}(이)다.",
        "{clause_subject}삶을 시작한 날은 {value}(이)다.",
        "{clause_subject}태어난 날은 {value}(이)다.",
        "{value}은(는) {clause_subject}태어난 날이다.",
        "기록에 따르면 {subject}{value}에 태어났다.",
    ),
    "birth_city": (
        "{subject}{value}에서 태어났다.",
        "{subject}{value}에서 태어나 그곳에서 자랐다.",
        "{subject}{value} 출신이다.",
        "{subject}{value} 태생이다.",
        "{subject}태어난 곳인 {value}에서 어린 시절을 보냈다.",
        "{possessive}고향은 {value}(이)다.",
        "{possessive}출생지는 {value}(이)다.",
        "{clause_subject}태어난 도시는 {value}(이)다.",
        "{clause_subject}처음 세상의 빛을 본 곳은 {value}(이)다.",
        "{value}은(는) {clause_subject}태어난 도시다.",
    ),
    "university": (
        "{subject}{value}을(를) 졸업했다.",
        "{subject}{value}에서 공부했다.",
        "{subject}{value}에서 학위를 받았다.",
        "{subject}{value}에서 학업을 마쳤다.",
        "{subject}{value}에서 대학 시절을 보냈다.",
        "{subject}{value}에 진학해 학업을 마쳤다.",
        "{possessive}모교는 {value}(이)다.",
        "{possessive}출신 대학은 {value}(이)다.",
        "{clause_subject}졸업한 대학은 {value}(이)다.",
        "{value}은(는) {clause_subject}나온 학교다.",
    ),
    "major": (
        "{subject}{value}을(를) 전공했다.",
        "{subject}대학에서 {value}을(를) 공부했다.",
        "{subject}{value} 학위를 가지고 있다.",
        "{subject}{value} 전공으로 학위를 받았다.",
        "{subject}전공으로 {value}을(를) 선택했다.",
        "{subject}대학 시절 {value}을(를) 깊이 공부했다.",
        "{possessive}전공은 {value}(이)다.",
        "{possessive}전공 분야는 {value}(이)다.",
        "{clause_subject}대학에서 공부한 분야는 {value}(이)다.",
        "{value}은(는) {clause_subject}전공한 분야다.",
    ),
    "employer": (
        "{subject}{value}에 다닌다.",
        "{subject}{value}에서 근무한다.",
        "{subject}{value}에 재직 중이다.",
        "{subject}{value}에 몸담고 있다.",
        "{subject}{value}에서 경력을 쌓고 있다.",
        "{subject}{value} 직원이다.",
        "{subject}{value} 소속으로 일한다.",
        "{possessive}직장은 {value}(이)다.",
        "{clause_subject}다니는 회사는 {value}(이)다.",
        "{value}은(는) {clause_subject}일하는 회사다.",
    ),
    "work_city": (
        "{subject}{value}에서 일한다.",
        "{subject}{value}에서 근무하고 있다.",
        "{subject}{value}에서 직장 생활을 한다.",
        "{subject}현재 {value}에서 일하고 있다.",
        "{subject}{value}(으)로 출근한다.",
        "{subject}{value}에 있는 사무실에서 일한다.",
        "{possessive}근무지는 {value}(이)다.",
        "{possessive}일터는 {value}에 있다.",
        "{clause_subject}일하는 도시는 {value}(이)다.",
        "{value}은(는) {clause_subject}일하는 도시다.",
    ),
}

ENGLISH_QUESTIONS = {
    "birth_date": "What is the birth date of {name}?",
    "birth_city": "What is the birth city of {name}?",
    "university": "What is the university of {name}?",
    "major": "What is the major of {name}?",
    "employer": "What is the employer of {name}?",
    "work_city": "What is the work city of {name}?",
}

KOREAN_QUESTIONS = {
    "birth_date": "{name}의 생년월일은 언제인가요?",
    "birth_city": "{name}의 출생 도시는 어디인가요?",
    "university": "{name}의 출신 대학은 어디인가요?",
    "major": "{name}의 전공은 무엇인가요?",
    "employer": "{name}의 직장은 어디인가요?",
    "work_city": "{name}의 근무 도시는 어디인가요?",
}
